# Command lines of the 2021 code, run in its folder src/. tests/cli/test_old_commands.py runs them.

# train-tiny-rpe
python -m torch.distributed.launch --nproc_per_node=4 --master_port=12345 run_experiment.py \
    --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/train-tiny-rpe' \
    OPTIM.OPT adamw OPTIM.LR 1e-3 OPTIM.WD 0.1 DATALOADER.BSZ 1024 OPTIM.EPOCHS 300 \
    SOLVER.LR_POLICY cosine INPUT.IMAGE_SIZE 224 AUG.REPEATED_AUG False \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerhand \
    MODEL.VIT.MSVIT.ARCH 'l1,h1,d48,n1,s1,g1,p4,f7,a0_l2,h3,d96,n2,s1,g1,p2,f7,a0_l3,h3,d192,n8,s0,g1,p2,f7,a0_l4,h6,d384,n1,s0,g0,p2,f7,a0'

# train-tiny-rpe-random-shift
python -m torch.distributed.launch --nproc_per_node=4 --master_port=12345 run_experiment.py \
    --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/train-tiny-rpe-random-shift' \
    OPTIM.OPT adamw OPTIM.LR 1e-3 OPTIM.WD 0.1 DATALOADER.BSZ 1024 OPTIM.EPOCHS 300 \
    SOLVER.LR_POLICY cosine INPUT.IMAGE_SIZE 224 AUG.REPEATED_AUG False \
    MODEL.VIT.MSVIT.MODE 1 MODEL.VIT.MSVIT.VIL_MODE_SWITCH 0.875 \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerhand \
    MODEL.VIT.MSVIT.ARCH 'l1,h1,d48,n1,s1,g1,p4,f7,a0_l2,h3,d96,n2,s1,g1,p2,f7,a0_l3,h3,d192,n8,s0,g1,p2,f7,a0_l4,h6,d384,n1,s0,g0,p2,f7,a0'

# finetune-384
python -m torch.distributed.launch --nproc_per_node=8 --master_port=12345 run_experiment.py \
    --config-file 'config/msvit_384finetune.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/finetune-384' \
    OPTIM.OPT qhm OPTIM.LR 0.01 OPTIM.WD 0.0 DATALOADER.BSZ 256 OPTIM.EPOCHS 10 \
    MODEL.MODEL_PATH IN22kpretrained/deepmedium/model_best.pth \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerhand \
    MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f8_l2,h3,d192,n4,s1,g1,p2,f12_l3,h6,d384,n16,s0,g1,p2,f7_l4,h12,d768,n1,s0,g0,p2,f7'

# evaluate-tiny
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-tiny' \
    EVALUATE True MODEL.MODEL_PATH visionlongformer/msvit_tiny_longformersw_1191_train/model_best.pth OPTIM.OPT adamw \
    INPUT.IMAGE_SIZE 224 INPUT.CROP_PCT 0.875 \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerhand MODEL.VIT.MSVIT.ARCH 'l1,h1,d48,n1,s1,g1,p4,f7_l2,h3,d96,n1,s1,g1,p2,f7_l3,h3,d192,n9,s0,g1,p2,f7_l4,h6,d384,n1,s0,g0,p2,f7'

# evaluate-tiny-rpe
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-tiny-rpe' \
    EVALUATE True MODEL.MODEL_PATH visionlongformer/longtiny1191_ape0_exact0_nglo1_mode1_swith075/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.MODE 1 MODEL.VIT.MSVIT.VIL_MODE_SWITCH 0.75 \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerhand MODEL.VIT.MSVIT.ARCH 'l1,h1,d48,n1,s1,g1,p4,f7,a0_l2,h3,d96,n1,s1,g1,p2,f7,a0_l3,h3,d192,n9,s0,g1,p2,f7,a0_l4,h6,d384,n1,s0,g0,p2,f7,a0'

# evaluate-small-auto
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-small-auto' \
    EVALUATE True MODEL.MODEL_PATH visionlongformer/msvit_small_longformersw_1281_train/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerauto MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f7_l2,h3,d192,n2,s1,g1,p2,f7_l3,h6,d384,n8,s0,g1,p2,f7_l4,h12,d768,n1,s0,g0,p2,f7'

# evaluate-small-exact
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-small-exact' \
    EVALUATE True MODEL.MODEL_PATH visionlongformer/msvit_small_longformersw_1281_train/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.SW_EXACT 1 \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerhand MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f7_l2,h3,d192,n2,s1,g1,p2,f7_l3,h6,d384,n8,s0,g1,p2,f7_l4,h12,d768,n1,s0,g0,p2,f7'

# evaluate-medium-deep-384
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-medium-deep-384' \
    EVALUATE True MODEL.MODEL_PATH IN384_IN22kpretrained/msvitdeepmedium_imagenet384_finetune_bsz256_lr001_wd0/model_best.pth OPTIM.OPT adamw \
    INPUT.IMAGE_SIZE 384 INPUT.CROP_PCT 0.922 FINETUNE.FINETUNE True \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerhand MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f7_l2,h3,d192,n4,s1,g1,p2,f7_l3,h6,d384,n16,s0,g1,p2,f7_l4,h12,d768,n1,s0,g0,p2,f7'

# evaluate-base-deep-384
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-base-deep-384' \
    EVALUATE True MODEL.MODEL_PATH IN384_IN22kpretrained/msvitdeepbase_imagenet384_finetune_bsz640_lr003_wd0/model_best.pth OPTIM.OPT adamw \
    INPUT.IMAGE_SIZE 384 INPUT.CROP_PCT 0.922 FINETUNE.FINETUNE True MODEL.VIT.MSVIT.LN_EPS 1e-5 \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerhand MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f6_l2,h3,d192,n8,s1,g1,p2,f8_l3,h6,d384,n24,s0,g1,p2,f7_l4,h12,d768,n1,s0,g0,p2,f7'

# evaluate-full
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-full' \
    EVALUATE True MODEL.MODEL_PATH fullMSA/small1281/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ATTN_TYPE full MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f7_l2,h3,d192,n2,s1,g1,p2,f7_l3,h6,d384,n8,s0,g1,p2,f7_l4,h12,d768,n1,s0,g0,p2,f7'

# evaluate-linformer
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-linformer' \
    EVALUATE True MODEL.MODEL_PATH linformer/small1281_full/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ATTN_TYPE linformer MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f256_l2,h3,d192,n2,s1,g1,p2,f256_l3,h6,d384,n8,s1,g1,p2,f256_l4,h12,d768,n1,s1,g0,p2,f256'

# evaluate-linformer-partial
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-linformer-partial' \
    EVALUATE True MODEL.MODEL_PATH linformer/small1281_partial/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ATTN_TYPE linformer MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f256_l2,h3,d192,n2,s1,g1,p2,f256_l3,h6,d384,n8,s0,g1,p2,f256_l4,h12,d768,n1,s0,g0,p2,f256'

# evaluate-srformer64
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-srformer64' \
    EVALUATE True MODEL.MODEL_PATH srformer/srformerfull1281/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ATTN_TYPE srformer MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f16_l2,h3,d192,n2,s1,g1,p2,f8_l3,h6,d384,n8,s1,g1,p2,f4_l4,h12,d768,n1,s1,g0,p2,f2'

# evaluate-srformer32
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-srformer32' \
    EVALUATE True MODEL.MODEL_PATH srformer/srformerfull8_1281/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ATTN_TYPE srformer MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f8_l2,h3,d192,n2,s1,g1,p2,f4_l3,h6,d384,n8,s1,g1,p2,f2_l4,h12,d768,n1,s0,g0,p2,f1'

# evaluate-srformer-partial
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-srformer-partial' \
    EVALUATE True MODEL.MODEL_PATH srformer/srformerpartial1281/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ATTN_TYPE srformer MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f8_l2,h3,d192,n2,s1,g1,p2,f4_l3,h6,d384,n8,s0,g1,p2,f2_l4,h12,d768,n1,s0,g0,p2,f1'

# evaluate-global
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-global' \
    EVALUATE True MODEL.MODEL_PATH globalformer/globalfull1281/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ONLY_GLOBAL True MODEL.VIT.AVG_POOL True \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerhand MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g256,p4,f7_l2,h3,d192,n2,s1,g256,p2,f7_l3,h6,d384,n8,s1,g64,p2,f7_l4,h12,d768,n1,s1,g16,p2,f7'

# evaluate-global-partial
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-global-partial' \
    EVALUATE True MODEL.MODEL_PATH globalformer/globalpartial1281/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ONLY_GLOBAL True MODEL.VIT.AVG_POOL True \
    MODEL.VIT.MSVIT.ATTN_TYPE longformerhand MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g256,p4,f7_l2,h3,d192,n2,s1,g256,p2,f7_l3,h6,d384,n8,s0,g1,p2,f7_l4,h6,d384,n1,s0,g0,p2,f7'

# evaluate-performer
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-performer' \
    EVALUATE True MODEL.MODEL_PATH performer/fullperformer1281/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ATTN_TYPE performer MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f256_l2,h3,d192,n2,s1,g1,p2,f256_l3,h6,d384,n8,s1,g1,p2,f256_l4,h12,d768,n1,s1,g0,p2,f256'

# evaluate-performer-partial
python run_experiment.py --config-file 'config/msvit.yaml' --data '../datasets/imagenet/2012' --output_dir '../run/evaluate-performer-partial' \
    EVALUATE True MODEL.MODEL_PATH performer/partialperformer1281/model_best.pth OPTIM.OPT adamw \
    MODEL.VIT.MSVIT.ATTN_TYPE performer MODEL.VIT.MSVIT.ARCH 'l1,h3,d96,n1,s1,g1,p4,f256_l2,h3,d192,n2,s1,g1,p2,f256_l3,h6,d384,n8,s0,g1,p2,f256_l4,h12,d768,n1,s0,g0,p2,f256'
